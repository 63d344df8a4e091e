"""Worker process that loads models, runs jobs and reports to the dispatcher."""
