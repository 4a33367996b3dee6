package qemu

import (
	"testing"
	"time"
)

// TestTSC measures the frequency twice, over times of different length.
func TestTSC(t *testing.T) {
	kHz := newTSC()()
	if kHz == 0 {
		t.Skip("the time stamp counter of this CPU stops or changes its speed")
	}
	first := readTSC()
	time.Sleep(3 * tscBaseline) //nolint:forbidigo // the time that passes is what is measured
	again := first.kHz(readTSC())
	if off := again - kHz; off > kHz/1000 || off < -kHz/1000 {
		t.Errorf("%d kHz, then %d kHz", kHz, again)
	}
	if later := (tscReading{}).kHz(tscReading{}); later != 0 {
		t.Errorf("no time passed: %d kHz", later)
	}
}
