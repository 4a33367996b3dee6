package local_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

// cycle repeats forever what pulls, collections and removals do: content is added, moves, gets a second name, and is
// removed. Each of its names has an origin that says which content it is of.
func cycle(ctx context.Context, s *local.Store) int {
	put := func(key, body string) (image.Image, error) {
		return s.Put(ctx, key, bytes.NewReader(diskOf(body)), image.Fetched{Origin: originOf(body)})
	}
	for n := 0; ; n++ {
		img, err := put("a", "one")
		if err == nil {
			_, err = s.Link(ctx, "b/c", img.ID, originOf("one"))
		}
		if err == nil {
			_, err = put("a", "two")
		}
		s.Touch(img.ID)
		switch {
		case err != nil:
		case n%3 == 0:
			_, err = s.Collect(ctx, image.GCLimits{MaxSize: 1}, nil)
		case n%3 == 1:
			err = s.Remove(ctx, img.ID, nil)
		default:
			err = s.Remove(ctx, "b/c", nil)
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
	}
}

func originOf(body string) image.Origin {
	return image.Origin{URL: "https://example.com/" + body, ETag: body, Digest: idOf(diskOf(body))}
}

func TestKilledAnywhereInTheLifeOfImages(t *testing.T) {
	for _, pattern := range []string{
		"tmp/*", "tmp/*/disk.raw", "tmp/*/out", "tmp/*/out/unclaimed", "tmp/*/out/image.json", "tmp/*/out/disk.raw", "data/*", "data/*/unclaimed",
		"tmp/*/origin", "origins/*", "tmp/*/name", "links/a", "links/b%c", "data/*/used", "tmp/*/gone-*", "tmp/*/gone-*/*",
	} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for range 3 { // each on what the previous one left
				p := start(t, dir, childCycle+"=1")
				p.until(t, func() bool { hits, _ := filepath.Glob(filepath.Join(dir, pattern)); return len(hits) > 0 })
				p.kill()
				if p.output.Len() > 0 {
					t.Errorf("it failed before: %s", p.output)
				}
				sound(t, dir)
			}
		})
	}
}

// sound checks that every name has complete content and the origin of exactly that content, and that a collection leaves
// nothing else.
func sound(t *testing.T, dir string) {
	t.Helper()
	s := open(t, dir)
	all, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	bodies := map[string]string{idOf(diskOf("one")): "one", idOf(diskOf("two")): "two"}
	ids := map[string]bool{}
	for _, i := range all {
		ids[i.ID] = true
		if o, _, err := s.Origin(t.Context(), i.Name); err != nil || o != originOf(bodies[i.ID]) {
			t.Errorf("%s is %q and comes from %+v, %v", i.Name, bodies[i.ID], o, err)
		}
		var buf bytes.Buffer
		if err := s.Export(t.Context(), i.Name, &buf); err != nil || idOf(buf.Bytes()) != i.ID {
			t.Errorf("%s is not whole: %d bytes, %v", i.Name, buf.Len(), err)
		}
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{}, nil); err != nil {
		t.Fatal(err)
	}
	after, err := s.List(t.Context())
	if err != nil || len(after) != len(all) {
		t.Errorf("a collection without limits made %d names of %d, %v", len(after), len(all), err)
	}
	for sub, want := range map[string]int{"data": len(ids), "links": len(all), "origins": len(all), "tmp": 0} {
		if got := entries(t, dir, sub); len(got) != want {
			t.Errorf("%s holds %v, there should be %d", sub, got, want)
		}
	}
	marks, _ := filepath.Glob(filepath.Join(dir, "data", "*", "unclaimed"))
	temps, _ := filepath.Glob(filepath.Join(dir, "*", ".*"))
	if left := append(marks, temps...); len(left) > 0 {
		t.Errorf("left: %s", strings.Join(left, " "))
	}
}

// TestKilledConversion kills a store during a conversion: the converter dies with it.
func TestKilledConversion(t *testing.T) {
	dir, bin := t.TempDir(), t.TempDir()
	pid := filepath.Join(dir, "pid")
	// A converter that reports its process id and never ends.
	script := "#!/bin/sh\necho $$ >/proc/self/fd/4\nexec sleep 600\n"
	if err := os.WriteFile(filepath.Join(bin, "qemu-img"), []byte(script), 0o755); err != nil { //nolint:gosec // another user runs it
		t.Fatal(err)
	}
	for d := bin; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil { //nolint:gosec // another user looks through it
			t.Fatal(err)
		}
	}
	p := start(t, dir, "PATH="+bin+":"+os.Getenv("PATH"))
	go func() { _, _ = p.stdin.Write(smallVMDK()); _ = p.stdin.Close() }()
	p.until(t, func() bool {
		hits, _ := filepath.Glob(filepath.Join(dir, "tmp/*/out/disk.qcow2"))
		if len(hits) == 0 {
			return false
		}
		data, _ := os.ReadFile(hits[0])
		return len(data) > 1 && os.WriteFile(pid, data, 0o600) == nil
	})
	p.kill()
	number, err := os.ReadFile(pid)
	if err != nil {
		t.Fatalf("%v %s", err, p.output)
	}
	waitGone(t, "/proc/"+strings.TrimSpace(string(number)))
	if err := os.Remove(pid); err != nil {
		t.Fatal(err)
	}
	whole(t, dir)
}

// waitGone waits until a killed process is gone.
func waitGone(t *testing.T, proc string) {
	t.Helper()
	tick, end := time.NewTicker(time.Millisecond), time.NewTimer(time.Minute)
	defer tick.Stop()
	defer end.Stop()
	for {
		args, err := os.ReadFile(filepath.Join(proc, "cmdline"))
		if err != nil || !bytes.Contains(args, []byte("600")) {
			return
		}
		select {
		case <-tick.C:
		case <-end.C:
			t.Fatal("the converter outlived the store")
		}
	}
}

// smallVMDK is the header of a sparse VMware disk of 1 MiB, without a descriptor.
func smallVMDK() []byte {
	b := make([]byte, 64<<10)
	le := binary.LittleEndian
	copy(b, "KDMV")
	le.PutUint32(b[4:], 1)
	le.PutUint64(b[12:], 2048)
	le.PutUint64(b[20:], 128)
	le.PutUint32(b[44:], 512)
	le.PutUint64(b[56:], 26)
	return b
}
