package chunked_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/snapshot/local"
)

// With this environment, this binary pulls a snapshot and is killed during the pull.
const (
	envDir   = "TEST_PULL_DIR"
	envRef   = "TEST_PULL_REF"
	envPhase = "TEST_PULL_PHASE" // at this phase, it reports and waits to be killed
)

// With this environment, which loaders get too, this binary as a loader reads no job.
const (
	envLoader   = "NO_PROXY"
	loaderDies  = "dies.test"
	loaderHangs = "hangs.test"
)

func TestMain(m *testing.M) {
	if chunked.IsLoad(os.Args[1:]) {
		switch os.Getenv(envLoader) {
		case loaderDies:
			os.Exit(1)
		case loaderHangs: // until whoever has started it closes its standard input
			_, err := unix.Poll([]unix.PollFd{{Fd: 0}}, -1)
			for errors.Is(err, unix.EINTR) {
				_, err = unix.Poll([]unix.PollFd{{Fd: 0}}, -1)
			}
			os.Exit(1)
		}
		os.Exit(chunked.Load(context.Background(), os.Stdin))
	}
	if dir := os.Getenv(envDir); dir != "" {
		os.Exit(pullAndDie(dir))
	}
	os.Exit(m.Run())
}

func pullAndDie(dir string) int {
	s, err := local.New(local.Config{Dir: filepath.Join(dir, "store")})
	if err != nil {
		return 3
	}
	c := chunked.New(chunked.Config{Index: filepath.Join(dir, "index"), HTTP: ociclient.Config{Backoff: time.Millisecond}}, s)
	if os.Getenv(envPhase) == "early" {
		if _, _, err := c.PullEarly(context.Background(), os.Getenv(envRef), "x", token, nil); err != nil {
			return 4
		}
		_, _ = os.Stdout.WriteString("now\n")
		select {}
	}
	_, err = c.Pull(context.Background(), os.Getenv(envRef), "x", token, func(p snapshot.Progress) {
		if p.Phase == os.Getenv(envPhase) && (p.Phase != "fetching" || p.Done > 4<<20) {
			_, _ = os.Stdout.WriteString("now\n")
			select {}
		}
	})
	if err != nil {
		return 4
	}
	return 0
}

// TestKilledPull kills the process that pulls: only what the store sweeps remains, and the next pull succeeds.
func TestKilledPull(t *testing.T) {
	here := newStore(t)
	h := here.save(t, guest{name: "s", seed: 1})
	ref := epoch(t, t.TempDir()) + "/vm/web:v1"
	push(t, client(t, here, nil), h, ref)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, phase := range []string{"preparing", "fetching", "verifying"} {
		t.Run(phase, func(t *testing.T) {
			dir := t.TempDir()
			cmd := exec.CommandContext(t.Context(), self)
			cmd.Env = append(os.Environ(), envDir+"="+dir, envRef+"="+ref, envPhase+"="+phase)
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := out.Read(make([]byte, 4)); err != nil {
				t.Fatalf("it ended before: %v, %v", err, cmd.Wait())
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			s := newStoreAt(t, filepath.Join(dir, "store"))
			empty(t, s)
			got, _ := pull(t, client(t, s, func(c *chunked.Config) { c.Index = filepath.Join(dir, "index") }), s, ref, "x")
			same(t, h.Dir(), got.Dir())
		})
	}
}
