"""What the configurations of quantization tools declare about the modules of a checkpoint."""
