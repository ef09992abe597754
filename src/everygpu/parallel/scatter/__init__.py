"""Cut a call into one share for each replica."""
