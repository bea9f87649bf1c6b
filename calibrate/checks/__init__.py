"""What one GPU is asked to show: correct kernels, near what the chip can do, and a true twin."""
