//go:build cri

package cri

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
)

// better names the specs that containerd fails and what stands before it must pass, with the reason.
var better = map[string]string{}

// TestCritest runs critest against containerd, and through cocoond's socket before it. Of a spec it does not matter how it ends, but
// that it ends in the same way.
func TestCritest(t *testing.T) {
	d := containerdtest.Start(t)
	sides := []struct{ name, socket string }{
		{"containerd", d.Socket()},
		{"cocoond", openDoor(t, d).socket},
	}
	scores := map[string]map[string]Outcome{}
	for _, side := range sides {
		began := time.Now()
		scores[side.name] = Score(t, Run{
			Socket: side.socket, Focus: os.Getenv("CRITEST_FOCUS"), Skip: os.Getenv("CRITEST_SKIP"),
			Dir: d.Dir("critest-" + side.name), Path: d.Path(), Log: logFile(side.name),
		})
		t.Logf("%s, in %v: %s", side.name, time.Since(began).Round(time.Second), Table(scores[side.name]))
	}
	for _, line := range unexcused(scores["containerd"], excuses) {
		t.Error("containerd:", line)
	}
	for _, side := range sides[1:] {
		for _, line := range Compare(scores[side.name], scores["containerd"], better) {
			t.Errorf("%s: %s", side.name, line)
		}
	}
}

// logFile returns where what critest prints for a side goes: nowhere unless CRITEST_LOG names a folder.
func logFile(side string) string {
	dir := os.Getenv("CRITEST_LOG")
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, "critest-"+side+".log")
}
