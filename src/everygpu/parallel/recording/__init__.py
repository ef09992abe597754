"""Work of all devices recorded as CUDA graphs, and launched in place of Python while nothing has changed."""
