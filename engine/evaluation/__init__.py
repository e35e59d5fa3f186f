"""How good a model is on texts and tasks: perplexity, multiple choice, divergence from another model, importances."""
