package local_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// With these variables, the test binary imports its standard input or removes a name, and is killed during this work.
const (
	childDir    = "COCOON_TEST_IMAGE_DIR"
	childRemove = "COCOON_TEST_IMAGE_REMOVE"
	childCycle  = "COCOON_TEST_IMAGE_CYCLE"
	childRaw    = "COCOON_TEST_IMAGE_RAW"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		os.Exit(child(dir))
	}
	os.Exit(m.Run())
}

func child(dir string) int {
	t := &testing.T{}
	s, ctx := open(t, dir), context.Background()
	if os.Getenv(childCycle) != "" {
		return cycle(ctx, s)
	}
	if vmDir := os.Getenv(childRaw); vmDir != "" {
		img, err := s.Get(ctx, "disk")
		if err == nil {
			_, err = s.Prepare(ctx, img, image.Layout{Dir: vmDir, Raw: true})
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		return 0
	}
	if os.Getenv(childRemove) != "" {
		for {
			_, _ = s.Import(ctx, "app", bytes.NewReader(large().OCI()), nil)
			_ = s.Remove(ctx, "app", nil)
		}
	}
	_, err := s.Import(ctx, "app", os.Stdin, func(n int64) { fmt.Println(n) })
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// large is an image whose import takes a moment.
func large() ociimage.Image {
	noise := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise) // the same every time, and not compressible
	return ociimage.Image{Layers: []ociimage.Layer{{Tar: ociimage.Tar(ociimage.File("big", string(noise))), Compress: "gzip"}}}
}

type process struct {
	*exec.Cmd
	stdin  io.WriteCloser
	output *bytes.Buffer
	done   chan error
}

func start(t *testing.T, dir string, env ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: exec.Command(self), output: &bytes.Buffer{}, done: make(chan error, 1)}
	p.Env = append(append(os.Environ(), childDir+"="+dir, "GORACE=atexit_sleep_ms=0"), env...)
	p.Stdout, p.Stderr = p.output, p.output
	if p.stdin, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.Wait() }()
	return p
}

// until waits for cond, or for the end of the process.
func (p *process) until(t *testing.T, cond func() bool) {
	t.Helper()
	tick, end := time.NewTicker(50*time.Microsecond), time.NewTimer(time.Minute)
	defer tick.Stop()
	defer end.Stop()
	for !cond() {
		select {
		case err := <-p.done:
			p.done <- err
			return
		case <-tick.C:
		case <-end.C:
			p.kill()
			t.Fatal("it never came to that")
		}
	}
}

func (p *process) kill() {
	_ = p.Process.Kill()
	if err := <-p.done; err == nil {
		return // it ended by itself
	}
}

// whole checks that the store holds only complete, named images.
func whole(t *testing.T, dir string) {
	t.Helper()
	s := open(t, dir)
	all, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, i := range all {
		named[strings.TrimPrefix(i.ID, "sha256:")] = true
		root, err := s.Prepare(t.Context(), i, image.Layout{Dir: t.TempDir(), Storage: 16 << 20})
		if err != nil {
			t.Errorf("an image survived that does not work: %v", err)
		} else if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", root.Disks[0].Path).CombinedOutput(); err != nil {
			t.Errorf("an image survived that is not whole: %s", out)
		}
	}
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left in tmp: %v", left)
	}
	for _, sub := range []string{"data", "links"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != len(all) {
			t.Errorf("%s holds %v, the list %v", sub, entries, all)
		}
	}
	if marks, _ := filepath.Glob(filepath.Join(dir, "data", "*", "unclaimed")); len(marks) > 0 {
		t.Errorf("left: %v", marks)
	}
}

func TestKilledImportLeavesAllOrNothing(t *testing.T) {
	data := large().OCI()
	// Each pattern appears at one step of an import; the process is killed when it appears.
	for _, pattern := range []string{
		"tmp/*", "tmp/*/archive", "tmp/*/out", "tmp/*/pins", "tmp/*/layer-0", "tmp/*/layer-0/layer.recipe",
		"tmp/*/layer-0/layer.ext4", "tmp/*/layer-0/layer.json", "layers/*", "tmp/*/out/config.json", "tmp/*/out/unclaimed",
		"tmp/*/out/image.json", "data/*", "tmp/*/name", "links/*",
	} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := start(t, dir)
			go func() { _, _ = p.stdin.Write(data); _ = p.stdin.Close() }()
			p.until(t, func() bool { hits, _ := filepath.Glob(filepath.Join(dir, pattern)); return len(hits) > 0 })
			p.kill()
			whole(t, dir)
			s := open(t, dir)
			if _, err := s.Import(t.Context(), "app", bytes.NewReader(data), nil); err != nil {
				t.Errorf("a second attempt: %v", err)
			}
			whole(t, dir)
		})
	}
}

func TestKilledInTheMiddleOfItsInput(t *testing.T) {
	dir, data := t.TempDir(), large().OCI()
	p := start(t, dir)
	if _, err := p.stdin.Write(data[:len(data)/2]); err != nil {
		t.Fatal(err)
	}
	p.until(t, func() bool { hits, _ := filepath.Glob(filepath.Join(dir, "tmp/*/archive")); return len(hits) > 0 })
	p.kill()
	if len(leftovers(t, dir)) == 0 {
		t.Error("it was killed too late to show anything")
	}
	whole(t, dir)
}

func TestKilledRemovalLeavesAllOrNothing(t *testing.T) {
	for _, pattern := range []string{"data/*/unclaimed", "tmp/*/gone-*", "links/*"} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := start(t, dir, childRemove+"=1")
			p.until(t, func() bool { hits, _ := filepath.Glob(filepath.Join(dir, pattern)); return len(hits) > 0 })
			p.kill()
			whole(t, dir)
		})
	}
}

// TestSweepLeavesLivingImportsAlone opens the store again while another process and this one run imports.
func TestSweepLeavesLivingImportsAlone(t *testing.T) {
	dir, data := t.TempDir(), large().OCI()
	p := start(t, dir)
	if _, err := p.stdin.Write(data[:len(data)/2]); err != nil {
		t.Fatal(err)
	}
	pr, pw := io.Pipe()
	mine := make(chan error, 1)
	go func() {
		_, err := open(t, dir).Import(t.Context(), "mine", pr, nil)
		mine <- err
	}()
	if _, err := pw.Write(data[:len(data)/2]); err != nil {
		t.Fatal(err)
	}
	p.until(t, func() bool { return len(leftovers(t, dir)) == 2 })
	if err := open(t, dir).Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := leftovers(t, dir); len(left) != 2 {
		t.Errorf("the sweep left %v", left)
	}
	_, err1 := p.stdin.Write(data[len(data)/2:])
	_, err2 := pw.Write(data[len(data)/2:])
	if err := errors.Join(err1, err2, p.stdin.Close(), pw.Close()); err != nil {
		t.Fatal(err)
	}
	if err := <-p.done; err != nil {
		t.Errorf("the other process: %v %s", err, p.output)
	}
	if err := <-mine; err != nil {
		t.Errorf("this process: %v", err)
	}
	all, err := open(t, dir).List(t.Context())
	if err != nil || len(all) != 2 || all[0].ID != all[1].ID {
		t.Errorf("there is %+v, %v", all, err)
	}
	if images, _ := os.ReadDir(filepath.Join(dir, "data")); len(images) != 1 {
		t.Errorf("the content is stored %d times", len(images))
	}
}

// TestProcessesImportTheSameContentAtOnce lets several processes race for one image and one name.
func TestProcessesImportTheSameContentAtOnce(t *testing.T) {
	dir, data := t.TempDir(), large().OCI()
	var all []*process
	for range 3 {
		p := start(t, dir)
		go func() { _, _ = p.stdin.Write(data); _ = p.stdin.Close() }()
		all = append(all, p)
	}
	for _, p := range all {
		if err := <-p.done; err != nil {
			t.Errorf("%v %s", err, p.output)
		}
	}
	whole(t, dir)
}

func TestForeignFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if _, err := s.Import(t.Context(), "app", bytes.NewReader(app("x").OCI()), nil); err != nil {
		t.Fatal(err)
	}
	foreign := []string{"data/notes", "links/NOTES", "links/link:latest", "templates/x"}
	for _, f := range foreign[:2] {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, foreign[2])); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	if all, err := s.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("list is %v, %v", all, err)
	}
	if _, err := s.Get(t.Context(), "link"); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a link out of the store: %v", err)
	}
	if err := s.Remove(t.Context(), "app", nil); err != nil {
		t.Fatal(err)
	}
	for _, f := range foreign[:3] {
		if _, err := os.Lstat(filepath.Join(dir, f)); err != nil {
			t.Errorf("%s is gone: %v", f, err)
		}
	}
}

func TestCollect(t *testing.T) {
	s := open(t, t.TempDir())
	var ids []string
	for _, body := range []string{"one", "two"} {
		img, err := s.Import(t.Context(), "app", bytes.NewReader(app(body).OCI()), nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, img.ID)
	}
	if freed, err := s.Collect(t.Context(), image.GCLimits{}, func(d string) bool { return slices.Contains(ids, d) }); err != nil || freed.Freed != 0 {
		t.Errorf("collected %d bytes in use, %v", freed.Freed, err)
	}
	if freed, err := s.Collect(t.Context(), image.GCLimits{}, nil); err != nil || freed.Freed == 0 {
		t.Errorf("collected %d bytes, %v", freed.Freed, err)
	}
	if _, err := s.Get(t.Context(), ids[0]); !errdefs.IsNotFound(err) {
		t.Errorf("the old content: %v", err)
	}
	if _, err := s.Get(t.Context(), ids[1]); err != nil {
		t.Errorf("the named content: %v", err)
	}
}
