"""Measurements that others published, as data files; README.md says where each comes from."""
