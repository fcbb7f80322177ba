"""The devices that a worker may compute on, a file or two each, behind one seam."""
