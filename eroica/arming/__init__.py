"""A folder that `eroica run` puts at the head of PYTHONPATH: every Python of the job finds its `sitecustomize`.

Nothing imports this package; see `sitecustomize` for what it does, and `eroica.launch` for who names the folder.
"""
