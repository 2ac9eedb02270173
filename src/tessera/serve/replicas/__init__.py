"""Several servers behind one front: processes, their health, routing, merged metrics."""
