"""``bench MODEL`` measures a model from inside the engine, ``bench serve`` a server over HTTP."""
