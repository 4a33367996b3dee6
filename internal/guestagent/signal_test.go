package guestagent

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestParseSignal(t *testing.T) {
	for text, want := range map[string]unix.Signal{
		"": unix.SIGTERM, "SIGTERM": unix.SIGTERM, "term": unix.SIGTERM, "9": unix.SIGKILL, "64": 64, "65": unix.SIGTERM, "0": unix.SIGTERM,
		"SIGRTMIN": 34, "SIGRTMIN+3": 37, "RTMAX-4": 60, "SIGRTMAX": 64, "SIGRTMIN-1": unix.SIGTERM, "SIGRTMAX+1": unix.SIGTERM,
		"SIGRTMIN+99": unix.SIGTERM, "SIGNOTHING": unix.SIGTERM, "SIGWINCH": unix.SIGWINCH,
	} {
		if got := parseSignal(text); got != want {
			t.Errorf("%q is %d, want %d", text, got, want)
		}
	}
}

func TestGroupsOfAProcess(t *testing.T) {
	u := user{uid: 7, gid: 70, groups: nil, listed: []uint32{71, 72}}
	own := func(strict bool) *limits {
		l := &limits{}
		l.Groups, l.StrictGroups = []int64{80, 71}, strict
		return l
	}
	for name, tc := range map[string]struct {
		limits *limits
		want   []uint32
	}{
		"no limits": {nil, []uint32{90}},
		"merged":    {own(false), []uint32{70, 71, 72, 80, 90}},
		"strict":    {own(true), []uint32{70, 80, 71, 90}},
	} {
		if d := diff.Of(tc.want, tc.limits.groups(u, []uint32{90})); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// A process is asked to end by the signal that its image or its pod names.
func TestStopSignal(t *testing.T) {
	for name, code := range map[string]int{"": 15, "SIGUSR1": 10, "12": 12, "QUIT": 3, "strange": 15} {
		t.Run(name, func(t *testing.T) {
			up := filepath.Join(t.TempDir(), "up")
			if err := unix.Mkfifo(up, 0o600); err != nil {
				t.Fatal(err)
			}
			c := script("a", vm.ContainerApp, vm.RestartNever, "for s in 3 10 12 15; do trap \"exit $s\" $s; done; echo > "+up+"; while :; do sleep 0.01; done")
			c.command.ends = parseSignal(name)
			p := several(t, c)
			if _, err := os.ReadFile(up); err != nil { // ends when the process has set its traps
				t.Fatal(err)
			}
			if err := p.kill(t.Context(), "a", 0, time.Minute); err != nil {
				t.Fatal(err)
			}
			if all, _ := p.look(); all[0].Exit == nil || all[0].Exit.Code != code {
				t.Errorf("it ended with %+v, want code %d", all[0].Exit, code)
			}
		})
	}
}
