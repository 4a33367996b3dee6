package local

// SetDisk makes s see a file system of that many bytes used and available.
func (s *Store) SetDisk(used, avail int64) {
	s.statfs = func(string) (diskUsage, error) { return diskUsage{used: used, avail: avail}, nil }
}

// ParseRef parses a reference by name and returns the keys it may mean.
func ParseRef(ref string) ([]string, error) {
	w, err := parseRef(ref)
	return w.keys(), err
}
