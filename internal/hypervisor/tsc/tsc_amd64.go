package tsc

// rdtsc reads the time stamp counter of the CPU.
func rdtsc() int64
