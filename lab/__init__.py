"""Everything that learns numbers: published runs, fits, residuals, regret."""
