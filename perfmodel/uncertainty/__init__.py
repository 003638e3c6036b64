"""How far predictions are from measurements: priors, residuals, intervals, probabilities, sensitivities and grades."""
