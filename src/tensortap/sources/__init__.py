"""Sources make records: catch, dump, track, trace and watch."""
