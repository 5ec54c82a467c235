"""The dashboard: files that a browser runs, and the table of them. `static/` is ours, `vendor/` is of others.

There is no build step: what is in the folder is what is served."""
