"""Level 2: training frameworks and serving engines: their options, what these change, and what each can run."""
