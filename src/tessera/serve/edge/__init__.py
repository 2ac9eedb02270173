"""Where connections arrive: deadlines, keys, limits of bodies, web pages that may call, and turns of tenants."""
