package local_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/csinode/csitest"
	"cocoonstack.io/cocoon/internal/csinode/local"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// The crash test runs this binary again as a node that kills itself before the n-th step, or that the driver kills in a call. The driver
// lives on in the test.
const (
	crashDir = "CSINODE_TEST_CRASH_DIR"
	crashOp  = "CSINODE_TEST_CRASH_OP"
	crashAt  = "CSINODE_TEST_CRASH_AT"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		at, _ := strconv.Atoi(os.Getenv(crashAt))
		if err := crash(dir, os.Getenv(crashOp), at); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// crash is the node: it does op and kills itself before a step. It exits with 0 if the operation has fewer steps.
func crash(dir, op string, at int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	n, err := local.New(ctx, local.Config{Plugins: dir + "/p", Dir: dir + "/d"})
	if err != nil {
		return err
	}
	n.Hurry()
	go func() { _ = n.Run(ctx) }() // ends with the process
	for {
		changed := n.Changed()
		if len(n.Drivers()) > 0 {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.New("no driver registers")
		}
	}
	step := 0
	n.OnStep(func(name string) {
		if step++; step == at {
			fmt.Println(name)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	r := request("pod", "v")
	switch op {
	case "publish":
		_, err = n.Publish(ctx, r)
		return err
	case "release":
		return n.Release(ctx, always)
	}
	return n.Unpublish(ctx, r.Key)
}

// child runs crash and returns the step before which it was killed; "": it was not.
func child(t *testing.T, w *world, op string, at int, started func(*os.Process)) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashDir+"="+strings.TrimSuffix(w.dir, "/d"), crashOp+"="+op, crashAt+"="+strconv.Itoa(at))
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	started(cmd.Process)
	err := cmd.Wait()
	if err == nil {
		return ""
	}
	if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !s.Signaled() || s.Signal() != syscall.SIGKILL {
		t.Fatalf("the node failed: %v\n%s", err, stderr.String())
	}
	if out.Len() == 0 {
		return "killed"
	}
	return strings.TrimSpace(out.String())
}

func TestKilledAtEachStep(t *testing.T) {
	for _, op := range []string{"publish", "unpublish", "release"} {
		steps := 0
		for at, ended := 1, false; !ended; at++ {
			for _, next := range []string{"publish", "unpublish", "release"} {
				w, d := crashed(t, op)
				step := child(t, w, op, at, func(*os.Process) {})
				if ended = step == ""; !ended {
					steps++
				}
				recover(t, w, d, fmt.Sprintf("%s killed before %q, then %s", op, step, next), next)
			}
		}
		if steps < 14 {
			t.Errorf("%s was killed only %d times", op, steps)
		}
	}
}

func TestKilledInACall(t *testing.T) {
	for _, c := range []struct{ method, op string }{
		{"NodeStageVolume", "publish"},
		{"NodePublishVolume", "publish"},
		{"NodeUnpublishVolume", "unpublish"},
		{"NodeUnstageVolume", "unpublish"},
		{"NodeUnpublishVolume", "release"},
		{"NodeUnstageVolume", "release"},
	} {
		method, op := c.method, c.op
		for _, next := range []string{"publish", "unpublish", "release"} {
			w, d := crashed(t, op)
			process := make(chan *os.Process, 1)
			d.On(method, &csitest.Fault{Entry: func() { // the driver goes on after that
				if err := (<-process).Kill(); err != nil {
					t.Error(err)
				}
			}})
			if child(t, w, op, 0, func(p *os.Process) { process <- p }) == "" {
				t.Errorf("%s made no call of %s", op, method)
			}
			d.On(method, nil)
			recover(t, w, d, fmt.Sprintf("%s killed in %s, then %s", op, method, next), next)
		}
	}
}

// crashed prepares a node for a child: with a published volume if op is to unpublish or release it.
func crashed(t *testing.T, op string) (*world, *csitest.Driver) {
	t.Helper()
	w, d := start(t, csitest.Options{Able: staging})
	if op != "publish" {
		w.publish(request("pod", "v"))
	}
	w.stop()
	return w, d
}

// recover opens the node that a killed child has left. The volume can be published, unpublished or released there, and then nothing is left.
func recover(t *testing.T, w *world, d *csitest.Driver, what, next string) {
	t.Helper()
	w.open()
	w.drivers("csi.test")
	r := request("pod", "v")
	list := w.List()
	if len(list) == 0 && d.Left() != nil {
		t.Errorf("%s: no record tells of %v", what, d.Left())
	}
	if next == "release" {
		w.release()
		if left := d.Left(); left != nil {
			t.Errorf("%s: the driver has %v", what, left)
		}
	}
	if next == "publish" {
		w.publish(r)
		if left := d.Left(); len(left) != 2 {
			t.Errorf("%s: the driver has %v", what, left)
		}
	}
	w.unpublish(r.Key)
	w.clean(d)
	if t.Failed() {
		t.Fatal(what)
	}
	w.stop()
}

func TestADamagedRecordHarmsNoOther(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"cut off":  func(path string) error { return os.Truncate(path, 20) },
		"empty":    func(path string) error { return os.Truncate(path, 0) },
		"huge":     func(path string) error { return os.Truncate(path, 1<<30) },
		"a folder": func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
		"a link":   func(path string) error { return errors.Join(os.Remove(path), os.Symlink("/etc/passwd", path)) },
		"a pipe":   func(path string) error { return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)) },
		"of a later version": func(path string) error {
			text, err := os.ReadFile(path)
			return errors.Join(err, os.WriteFile(path, bytes.Replace(text, []byte(`"version": 1`), []byte(`"version": 2`), 1), 0o600))
		},
		"of another key": func(path string) error {
			text, err := os.ReadFile(path)
			return errors.Join(err, os.WriteFile(path, bytes.Replace(text, []byte(`"holder": "a"`), []byte(`"holder": "c"`), 1), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, d := start(t, csitest.Options{Able: staging})
			a, b := request("a", "v"), request("b", "v") // of the same volume
			published := w.publish(a)
			files, err := os.ReadDir(w.dir + "/records")
			if err != nil || len(files) != 1 {
				t.Fatalf("%v: %v", files, err)
			}
			w.publish(b)
			w.stop()
			file := w.dir + "/records/" + files[0].Name()
			if err := damage(file); err != nil {
				t.Fatal(err)
			}
			w.open()
			w.drivers("csi.test")
			if list := w.List(); len(list) != 1 || list[0].Holder != "b" {
				t.Errorf("listed: %+v", list)
			}
			_, err = w.Publish(t.Context(), a)
			wantClass(t, err, errdefs.DataLoss, file)
			wantClass(t, w.Unpublish(t.Context(), a.Key), errdefs.DataLoss, file, "remove the record")
			if !strings.Contains(w.log.String(), file) {
				t.Error("the log does not name the record")
			}
			w.unpublish(b.Key)
			if _, err := os.Stat(published.Path); err != nil {
				t.Errorf("what the damaged record is about: %v", err)
			}
			if left := d.Left(); len(left) != 2 {
				t.Errorf("left for the holder with the damaged record: %v", left)
			}
			if _, err := os.Lstat(file); err != nil {
				t.Errorf("the damaged record: %v", err)
			}
		})
	}
}

func TestUnknownFilesAreLeft(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	w.publish(request("pod", "v"))
	w.stop()
	made := []string{"/mine", "/records/mine", "/published/mine", "/published/blue/mine", "/published/blue/pod/mine", "/staged/mine"}
	for _, f := range made {
		if err := os.Mkdir(w.dir+f, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	temp := w.dir + "/records/.x.json.tmp-1"
	if err := os.WriteFile(temp, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.log.b.Reset()
	w.open()
	for _, f := range made {
		if n := strings.Count(w.log.String(), "path="+w.dir+f+"\n"); n != 1 {
			t.Errorf("%s is logged %d times", f, n)
		}
	}
	if n := strings.Count(w.log.String(), "level=WARN"); n != len(made) {
		t.Errorf("%d warnings:\n%s", n, w.log)
	}
	w.drivers("csi.test")
	w.unpublish(request("pod", "v").Key)
	for _, f := range made {
		if err := os.Remove(w.dir + f); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(temp); err == nil {
		t.Error("an unfinished record is left")
	}
	for _, f := range []string{"/published/blue/pod", "/published/blue"} { // they were not empty
		if err := os.Remove(w.dir + f); err != nil {
			t.Error(err)
		}
	}
	w.clean(d)
}

// FuzzRecord: parsing any bytes gives DataLoss, or the record of the publication that its file name says. Such a record can be written and
// read again.
func FuzzRecord(f *testing.F) {
	const (
		key    = "2e2bbd0a4ff0ad5e1f7ac7aa8d7c5a13"
		volume = "00000000000000000000000000000000"
	)
	f.Add([]byte(`{"version":1,"key":{"owner":{"namespace":"blue"},"holder":"a","name":"data"},"driver":"csi.test","handle":"v",` +
		`"access":"folder","mode":"SINGLE_NODE_WRITER","staged":true,"boot":"b"}`))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{} {}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, text []byte) {
		k, v := key, volume
		var head struct {
			Key            csinode.Key `json:"key"`
			Driver, Handle string
		}
		if json.Unmarshal(text, &head) == nil {
			k, v = local.RecordName(head.Key, head.Driver, head.Handle)
		}
		r, err := local.ParseRecord(text, k, v)
		if err != nil {
			if !errdefs.Is(err, errdefs.DataLoss) {
				t.Fatalf("error %v of class %v", err, errdefs.ClassOf(err))
			}
			return
		}
		if _, err := local.ParseRecord(text, strings.Repeat("0", 32), v); err == nil {
			t.Fatal("a record is taken for that of another key")
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := local.ParseRecord(again, k, v); err != nil || back != r {
			t.Fatalf("%+v became %+v: %v", r, back, err)
		}
	})
}
