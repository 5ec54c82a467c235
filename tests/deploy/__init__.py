"""Files of `deploy/`: read by the tools of their formats, as far as these are to be had."""
