//go:build bench

package bench

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/port"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	carryRounds = 3
	benchToken  = "bench"
)

// carry compares pushing a snapshot to epoch and pulling it with the minimum for any transfer: hashing the bytes
// that are moved, and writing them to a file that is synced. The second comparison is the minimum for both ends
// together, if they share one machine.
func carry(t *testing.T, results *table) {
	d := start(t, "")
	ready := watchReady(t, d.Client)
	s := spec("heavy")
	s.Memory = 1 << 30
	must(d.Launch(t.Context(), s))(t)
	ready.wait(t, "heavy")
	if code, err := d.Exec(t.Context(), "heavy", guest.Exec{Command: []string{"dd", "if=/dev/urandom", "of=/dev/shm/x", "bs=1M", "count=480"}}, guest.Streams{}); err != nil || code != 0 {
		t.Fatal(code, err)
	}
	must(d.SaveSnapshot(t.Context(), "heavy", vm.SaveSpec{Name: "heavy"}))(t)
	remove(t, d, "heavy")
	auth := snapshot.Auth{Token: benchToken}

	var push, pull, again, floor, bare samples
	var moved, movedAgain int64
	for n := range carryRounds {
		registry := epoch(t)
		ref := fmt.Sprintf("http://%s/bench/heavy:%d", registry, n)
		count := func(to *int64) func(snapshot.Progress) { return func(p snapshot.Progress) { *to = max(*to, p.Moved) } }
		push = append(push, timed(func() { must(d.PushSnapshot(t.Context(), "heavy", ref, auth, count(&moved)))(t) }))
		movedAgain = 0
		again = append(again, timed(func() { must(d.PushSnapshot(t.Context(), "heavy", ref, auth, count(&movedAgain)))(t) }))
		other := start(t, "network: {enabled: false}")
		pull = append(pull, timed(func() { must(other.PullSnapshot(t.Context(), ref, "heavy", auth, nil))(t) }))
		floor = append(floor, hashAndWrite(t, moved))
		bare = append(bare, timed(func() { bareTransfer(t, moved) }))
	}
	speed := func(d time.Duration) string {
		return fmt.Sprintf("%.0f MiB/s", float64(moved)/(1<<20)/d.Seconds())
	}
	results.note("bytes of a push: %s", mib(moved))
	for _, r := range []struct {
		what string
		took samples
	}{{"push to epoch", push}, {"pull from epoch", pull}} {
		rate := float64(floor.median()) / float64(r.took.median())
		results.add(row{
			what: r.what + " (A), slower of sha256 and synced write of as many bytes (B)", a: speed(r.took.median()), b: speed(floor.median()),
			figure: fmt.Sprintf("%.2f x", rate), goal: ">= 0.8 x", missed: rate < 0.8, n: carryRounds,
		})
	}
	results.add(row{
		what: "push to epoch (A), bytes sent through a socket, hashed on both sides, written and synced (B)", a: speed(push.median()), b: speed(bare.median()),
		figure: fmt.Sprintf("%.2f x", float64(bare.median())/float64(push.median())), n: carryRounds,
	})
	share := float64(movedAgain) / float64(moved)
	results.add(row{
		what: "second push of the same (A), first (B): bytes moved", a: mib(movedAgain), b: mib(moved), figure: fmt.Sprintf("%.2f %%, %s", share*100, ms(again.median())),
		goal: "<= 5 %", missed: share > 0.05, n: carryRounds,
	})
}

// epoch starts a registry for the benchmark.
func epoch(t *testing.T) (addr string) {
	t.Helper()
	dir := scratch(t)
	tokens := filepath.Join(dir, "tokens")
	if err := os.WriteFile(tokens, []byte(benchToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	addr = must(port.Free())(t)
	log := must(os.Create(filepath.Join(dir, "log")))(t)
	defer log.Close()
	cmd := exec.Command(bin("epoch"), "serve", "--addr", addr, "--data", filepath.Join(dir, "data"), "--token-file", tokens)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	until(t, 20*time.Second, "epoch answers", func() bool {
		r, err := http.Get("http://" + addr + "/healthz")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	return addr
}

// hashAndWrite returns the longer of two times: hashing n bytes, and writing and syncing them.
func hashAndWrite(t *testing.T, n int64) time.Duration {
	t.Helper()
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i * i >> 3)
	}
	source := func() io.Reader { return io.LimitReader(&endless{block}, n) }
	hash := timed(func() { must(io.CopyBuffer(struct{ io.Writer }{sha256.New()}, source(), make([]byte, 1<<20)))(t) })
	write := timed(func() {
		f := must(os.Create(filepath.Join(scratch(t), "written")))(t)
		defer f.Close()
		must(io.CopyBuffer(struct{ io.Writer }{f}, source(), make([]byte, 1<<20)))(t)
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	})
	return max(hash, write)
}

// bareTransfer sends n bytes through a socket to a file that is synced. Each side hashes them while it moves them.
func bareTransfer(t *testing.T, n int64) {
	t.Helper()
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i * i >> 3)
	}
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	var g errgroup.Group
	g.Go(func() error {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		defer c.Close()
		f, err := os.Create(filepath.Join(scratch(t), "received"))
		if err != nil {
			return err
		}
		defer f.Close()
		return errors.Join(hashedCopy(f, c), f.Sync())
	})
	g.Go(func() error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		return errors.Join(hashedCopy(c, io.LimitReader(&endless{block}, n)), c.Close())
	})
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// hashedCopy copies, and hashes the copied bytes at the same time.
func hashedCopy(w io.Writer, r io.Reader) error {
	const depth = 8
	free, full := make(chan []byte, depth), make(chan []byte, depth)
	for range depth {
		free <- make([]byte, 1<<20)
	}
	var g errgroup.Group
	g.Go(func() error {
		sum := sha256.New()
		for b := range full {
			sum.Write(b)
			free <- b[:cap(b)]
		}
		return nil
	})
	err := func() error {
		defer close(full)
		for {
			b := <-free
			n, err := io.ReadFull(r, b)
			if _, err := w.Write(b[:n]); err != nil {
				return err
			}
			full <- b[:n]
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return nil
			}
			if err != nil {
				return err
			}
		}
	}()
	return errors.Join(err, g.Wait())
}

type endless struct{ block []byte }

func (e *endless) Read(p []byte) (int, error) { return copy(p, e.block), nil }
