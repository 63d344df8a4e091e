"""Worker process: loads models, runs jobs and reports to the dispatcher."""
