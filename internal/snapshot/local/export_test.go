package local

// SetScrubNow changes how many bytes are verified while the caller waits.
func SetScrubNow(n int64) (back func()) {
	was := scrubNow
	scrubNow = n
	return func() { scrubNow = was }
}
