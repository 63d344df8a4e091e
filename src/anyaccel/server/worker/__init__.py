"""The worker process: it loads models, runs jobs and reports to the dispatcher."""
