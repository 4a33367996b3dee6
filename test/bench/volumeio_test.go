//go:build bench

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

const (
	ioRounds = 9
	ioGoal   = 1.05 // of the time with the bare command
	ioImage  = "blockio"
	ioDevice = "/dev/io"
)

// ioTimes is the output of the command blockio.
type ioTimes struct {
	Write       time.Duration `json:"write"`
	Read        time.Duration `json:"read"`
	RandomWrite time.Duration `json:"random_write"`
	RandomRead  time.Duration `json:"random_read"`
}

// volumeIO compares what a guest reads from a volume of files and writes to it with the same in a plain QEMU. That one has the sandbox, too: what
// the sandbox costs each small request is not a cost of volumes.
func volumeIO(t *testing.T, results *table) {
	d := start(t, "")
	importBlockIO(t, d)
	for _, name := range []string{"ours", "model", "fresh"} {
		must(d.CreateVolume(t.Context(), volume.Spec{Name: name, Size: 128 << 20}))(t)
	}
	spec := func(name string) vm.Spec {
		s := spec(name)
		s.Image = ioImage
		s.Volumes = []vm.Volume{{Name: "io", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: name}}}
		s.Mounts = []vm.Mount{{Volume: "io", Path: ioDevice, Device: true}}
		return s
	}
	machine := newBare(t, d, spec, true)
	ready := watchReady(t, d.Client)
	must(d.Launch(t.Context(), spec("ours")))(t)
	ready.wait(t, "ours")
	ours := func() ioTimes {
		return blockIO(t, func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error) {
			return d.Exec(ctx, "ours", e, s)
		})
	}
	r := machine.run(t, 0)
	defer r.stop()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	socket := filepath.Join(r.dir, "agent.sock")
	until(t, 10*time.Second, "the bare QEMU listens", func() bool { _, err := os.Stat(socket); return err == nil })
	a := must(machine.greet(ctx, socket))(t)
	defer a.Close()
	bare := func() ioTimes { return blockIO(t, a.Exec) }

	var times [2][4]samples
	for n := range ioRounds + 1 {
		for turn := range 2 { // the first one alternates
			which := (n + turn) % 2
			got := []func() ioTimes{bare, ours}[which]()
			if n == 0 { // the files get their blocks, and the emulator has translated the code
				continue
			}
			for i, took := range []time.Duration{got.Write, got.Read, got.RandomWrite, got.RandomRead} {
				times[which][i] = append(times[which][i], took)
			}
		}
	}
	for i, what := range []string{"writes 128 MiB, 1 MiB each", "reads it", "writes 8 MiB, 4 KiB each, anywhere", "reads it"} {
		a, b := times[1][i].median(), times[0][i].median()
		ratio := float64(a) / float64(b)
		results.add(row{
			what: "a guest " + what + ", unbuffered: a volume (A), the bare QEMU command (B)", a: ms(a), b: ms(b),
			figure: fmt.Sprintf("%.2fx", ratio), goal: fmt.Sprintf("<= %.2fx", ioGoal), n: ioRounds, missed: ratio > ioGoal,
		})
	}
}

// blockIO runs the command blockio in a guest.
func blockIO(t *testing.T, exec func(context.Context, guest.Exec, guest.Streams) (int, error)) (got ioTimes) {
	t.Helper()
	var out, errs bytes.Buffer
	code, err := exec(t.Context(), guest.Exec{Command: []string{"/blockio", ioDevice}}, guest.Streams{Stdout: &out, Stderr: &errs})
	if err == nil && code == 0 {
		err = json.Unmarshal(out.Bytes(), &got)
	}
	if err != nil || code != 0 {
		t.Fatalf("blockio: code %d, %v, %s", code, err, errs.Bytes())
	}
	return got
}

// importBlockIO makes an image of the command blockio alone.
func importBlockIO(t *testing.T, d *daemon) {
	t.Helper()
	dir := scratch(t)
	program := filepath.Join(dir, "blockio")
	run(t, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./blockio")
	text := must(os.ReadFile(program))(t)
	img := ociimage.Image{
		Entrypoint: []string{"/blockio", "wait"},
		Layers: []ociimage.Layer{{Tar: ociimage.Tar(
			ociimage.Entry{Name: "blockio", Body: string(text), Mode: 0o755}, ociimage.Dir("dev"), ociimage.Dir("proc"), ociimage.Dir("sys"), ociimage.Dir("etc"),
		)}},
	}
	must(d.ImportImage(t.Context(), ioImage, bytes.NewReader(img.OCI()), nil))(t)
}
