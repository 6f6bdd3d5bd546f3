"""The properties of an excellent manifest, one function for each; `rules` names them all."""
