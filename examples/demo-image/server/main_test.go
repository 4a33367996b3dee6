package main

import (
	"net"
	"strconv"
	"testing"
)

// The other port is one more way in: that it is taken ends nothing.
func TestListen(t *testing.T) {
	both, err := listen("0", "0")
	if err != nil || len(both) != 2 {
		t.Fatalf("%d listeners, %v", len(both), err)
	}
	taken := strconv.Itoa(both[1].Addr().(*net.TCPAddr).Port)
	defer both[0].Close()
	defer both[1].Close()
	one, err := listen("0", taken)
	if err != nil || len(one) != 1 {
		t.Fatalf("with one port taken: %d listeners, %v", len(one), err)
	}
	defer one[0].Close()
	if _, err := listen(taken, "0"); err == nil {
		t.Error("the port that was asked for is taken, and nobody is told")
	}
}
