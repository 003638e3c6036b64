"""Training frameworks and serving engines: their options, what these change, and what each framework can run."""
