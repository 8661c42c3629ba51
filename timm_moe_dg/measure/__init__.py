"""Time, memory and arithmetic of models, measured side by side."""
