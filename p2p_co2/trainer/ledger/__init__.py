"""What the agreed model, the live model and open offers of each fragment are, on one worker thread."""
