"""The doctor for torch: findings from recorded steps, changed inputs and trials of remedies."""
