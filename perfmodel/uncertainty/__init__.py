"""Level 4: how far predictions are from measurements: priors, residuals, intervals, probabilities, sensitivities and grades."""
