//go:build bench

package bench

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

const (
	attachRounds = 11
	attachGoal   = 30 * time.Millisecond

	manyVolumes = 200
	lookRounds  = 20
	lookGoal    = 50 * time.Millisecond

	copySize   = 10 << 30
	copyData   = 1 << 30
	copyRounds = 10
	copyGoal   = 100 * time.Millisecond
)

// volumes measures what volumes cost: a boot with one, lists of many, and copies.
func volumes(t *testing.T, results *table) {
	d := start(t, "metricsAddr: "+engineMetrics)
	bootsWithVolume(t, d, results)
	lookAtVolumes(t, d, results)
	cloneVolume(t, results)
}

// bootsWithVolume compares boots of VMs with a volume, which has a file system, and boots without.
func bootsWithVolume(t *testing.T, d *daemon, results *table) {
	must(d.CreateVolume(t.Context(), volume.Spec{Name: "data", Size: 1 << 30}))(t)
	ready := watchReady(t, d.Client)
	once := func(name string, with bool) (launched, set, cpu time.Duration) {
		s := spec(name)
		if with {
			s.Volumes, s.Mounts = []vm.Volume{{Name: "data", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}}}, []vm.Mount{{Volume: "data", Path: "/data"}}
		}
		began := time.Now()
		must(d.Launch(t.Context(), s))(t)
		launched = time.Since(began)
		at, rec := ready.wait(t, name)
		cpu = cpuOf(t, rec.PID)
		if with {
			code, err := d.Exec(t.Context(), name, guest.Exec{Command: []string{"grep", "-q", " /data ext4 rw", "/proc/mounts"}}, guest.Streams{})
			if err != nil || code != 0 {
				t.Fatalf("the volume is not mounted: %d, %v", code, err)
			}
		}
		if err := d.Remove(t.Context(), name, true); err != nil {
			t.Fatal(err)
		}
		return launched, at.Sub(began), cpu
	}
	var launches, boots, cpus [2]samples
	for n := range attachRounds + 1 {
		for turn := range 2 { // the first one alternates, so that neither always finds the caches warm
			with := (n + turn) % 2
			launched, set, cpu := once(fmt.Sprintf("volume-%d-%d", n, with), with == 1)
			if n > 0 { // the first round makes the file system, and warms up
				launches[with], boots[with], cpus[with] = append(launches[with], launched), append(boots[with], set), append(cpus[with], cpu)
			}
		}
	}
	compare := func(what string, goal time.Duration, s [2]samples) {
		more := s[1].median() - s[0].median()
		r := row{what: what, a: ms(s[1].median()), b: ms(s[0].median()), figure: fmt.Sprintf("%+.0f ms", float64(more)/1e6), n: attachRounds}
		if goal > 0 {
			r.goal, r.missed = "<= "+ms(goal), more > goal
		}
		results.add(r)
	}
	compare("VM with an existing volume (A), without (B): until its process runs", attachGoal, boots)
	compare("the same: until the hypervisor runs", 0, launches)
	compare("the same: CPU time of the hypervisor until the process runs", attachGoal, cpus)
	results.note("ready with a volume:    %s", spread(boots[1]))
	results.note("ready without a volume: %s", spread(boots[0]))
	if err := d.RemoveVolume(t.Context(), "data"); err != nil {
		t.Fatal(err)
	}
}

// lookAtVolumes measures lists and scrapes of many volumes.
func lookAtVolumes(t *testing.T, d *daemon, results *table) {
	for n := range manyVolumes {
		must(d.CreateVolume(t.Context(), volume.Spec{Name: fmt.Sprint("many-", n), Size: volume.MinSize}))(t)
	}
	list := func() {
		if all := must(d.ListVolumes(t.Context()))(t); len(all) != manyVolumes {
			t.Fatalf("%d volumes are listed", len(all))
		}
	}
	scrape := func() {
		req := must(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+engineMetrics+"/metrics", nil))(t)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text := must(io.ReadAll(resp.Body))(t)
		if n := strings.Count(string(text), "cocoon_volume_allocated_bytes{"); n != manyVolumes {
			t.Fatalf("the figures of %d volumes are served", n)
		}
	}
	for what, look := range map[string]func(){"listed": list, "scraped": scrape} {
		var took samples
		for n := range lookRounds + 1 {
			began := time.Now()
			look()
			if n > 0 {
				took = append(took, time.Since(began))
			}
		}
		results.add(row{
			what: fmt.Sprintf("%d volumes %s: p50 (A), worst (B)", manyVolumes, what), a: millis(took.median()), b: millis(took.quantile(1)),
			goal: "<= " + ms(lookGoal), n: lookRounds, missed: took.median() > lookGoal,
		})
	}
}

// cloneVolume measures copies of a large volume on a file system that shares blocks.
func cloneVolume(t *testing.T, results *table) {
	mkfs, err := exec.LookPath("mkfs.xfs")
	if err != nil {
		results.note("clone of a volume: not measured, because there is no mkfs.xfs (package xfsprogs)")
		return
	}
	dir := scratch(t)
	image, mounted := filepath.Join(dir, "xfs"), filepath.Join(dir, "mounted")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 2*copySize); err != nil {
		t.Fatal(err)
	}
	run(t, mkfs, "-q", "-m", "reflink=1", image)
	if err := os.Mkdir(mounted, 0o700); err != nil {
		t.Fatal(err)
	}
	run(t, "mount", "-o", "loop", image, mounted)
	defer func() {
		if err := unix.Unmount(mounted, 0); err != nil {
			t.Error(err)
		}
	}()
	s := must(file.New(t.Context(), file.Config{Dir: filepath.Join(mounted, "volumes")}))(t)
	defer s.Close()
	must(s.Create(t.Context(), volume.Spec{Name: "large", Size: copySize}))(t)
	fillVolume(t, s, "large")
	copied := func() time.Duration {
		from, to := filepath.Join(mounted, "from"), filepath.Join(mounted, "to")
		began := time.Now()
		run(t, "cp", "--reflink=always", from, to)
		run(t, "sync", to)
		took := time.Since(began)
		if err := os.Remove(to); err != nil {
			t.Fatal(err)
		}
		return took
	}
	v, disk := attached(t, s, "large")
	run(t, "cp", "--reflink=always", disk.Path, filepath.Join(mounted, "from"))
	if err := s.Detach(t.Context(), "large", v.Attachments[0].VM); err != nil {
		t.Fatal(err)
	}
	var ours, theirs samples
	for n := range copyRounds + 1 {
		began := time.Now()
		must(s.Clone(t.Context(), "large", volume.Spec{Name: "copy"}))(t)
		took, bare := time.Since(began), copied()
		if err := s.Delete(t.Context(), "copy"); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			ours, theirs = append(ours, took), append(theirs, bare)
		}
	}
	results.add(row{
		what: fmt.Sprintf("clone of a volume of %d GiB with %d GiB of data, xfs (A), cp --reflink and sync (B)", copySize>>30, copyData>>30), a: millis(ours.median()), b: millis(theirs.median()),
		goal: "<= " + ms(copyGoal), n: copyRounds, missed: ours.median() > copyGoal,
	})
}

// attached attaches a volume to a VM that writes.
func attached(t *testing.T, s volume.Store, ref string) (volume.Volume, vm.Disk) {
	t.Helper()
	v, disk, err := s.Attach(t.Context(), ref, vm.NewID(), volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	return v, disk
}

// fillVolume writes random data to places all over a volume.
func fillVolume(t *testing.T, s volume.Store, ref string) {
	t.Helper()
	v, disk := attached(t, s, ref)
	f := must(os.OpenFile(disk.Path, os.O_WRONLY, 0))(t)
	defer f.Close()
	block := make([]byte, 16<<20)
	const blocks = copyData / (16 << 20)
	for n := range int64(blocks) {
		_, _ = rand.Read(block)
		must(f.WriteAt(block, n*(copySize/blocks)))(t)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := s.Detach(context.WithoutCancel(t.Context()), ref, v.Attachments[0].VM); err != nil {
		t.Fatal(err)
	}
}
