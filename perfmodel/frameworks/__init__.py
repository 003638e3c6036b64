"""Level 2: training frameworks and serving engines: their options, the effects of these, and the plans that each can run."""
