"""Plain training scripts that `eroica demo` runs in processes of their own; nothing imports them."""
