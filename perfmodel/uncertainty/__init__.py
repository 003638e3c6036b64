"""Level 4: uncertainty of predictions: priors, residuals, prediction intervals, probabilities, sensitivities and grades."""
