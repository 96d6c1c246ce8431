"""The frozen model as we see it: loaded, masked for trees, its cache kept by rows."""
