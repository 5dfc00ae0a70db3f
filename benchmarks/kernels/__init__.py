"""Each compiled kernel against the best way of torch. A module here with `cases()` is a kernel's."""
