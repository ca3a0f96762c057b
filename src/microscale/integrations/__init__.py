"""Microscale inside other engines. Only the other engine imports these modules."""
