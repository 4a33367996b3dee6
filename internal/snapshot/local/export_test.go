package local

// SetScrubNow changes how much is compared while somebody waits.
func SetScrubNow(n int64) (back func()) {
	was := scrubNow
	scrubNow = n
	return func() { scrubNow = was }
}
