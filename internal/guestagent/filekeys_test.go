package guestagent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// fileIn reads from files of this computer, as volumes do.
func fileIn(dir string) func(string, string, int) ([]byte, error) {
	return func(volume, name string, limit int) ([]byte, error) {
		text, err := os.ReadFile(filepath.Join(dir, volume, name))
		switch {
		case os.IsNotExist(err):
			return nil, errdefs.NotFoundf("the file does not exist")
		case err == nil && len(text) > limit:
			return nil, errdefs.Preconditionf("the file has more than %d bytes", limit)
		}
		return text, err
	}
}

func TestConfigureReadsFiles(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/v", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"good": "A='1'\nEMPTY=''\nNUL='\x00'\n", "bad": "A=1\n", "large": strings.Repeat("#", envFileBytes+1)} {
		if err := os.WriteFile(filepath.Join(dir, "v", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		path, key string
		optional  bool
		want      string // its value in an argument, or what the error says
	}{
		{"good", "A", false, "1"},
		{"good", "A", true, "1"},
		{"good", "B", true, "none"},
		{"good", "EMPTY", true, "none"},
		{"none", "A", true, "none"},
		{"good", "B", false, `environment variable key "B" not found in file "good" of volume "v"`},
		{"good", "EMPTY", false, "not found in file"},
		{"good", "NUL", true, "NUL bytes"},
		{"none", "A", false, `couldn't parse env file "none" of volume "v": the file does not exist`},
		{"bad", "A", true, "couldn't parse env file"},
		{"large", "A", true, "more than 65536 bytes"},
	} {
		c := &container{
			command: command{args: []string{vm.FileWord(0)}}, readFile: fileIn(dir),
			fileKeys: []vm.FileKey{{Name: "V", Volume: "v", Path: tc.path, Key: tc.key, Optional: tc.optional, Absent: "none"}},
		}
		args, _, err := c.configure()
		if err != nil && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) || err == nil && args[0] != tc.want {
			t.Errorf("%+v: %q, %v", tc, args, err)
		}
	}
}

// A container waits for the files that it needs, without a run, and reads them again for each run.
func TestContainersWaitForFiles(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/v", 0o755); err != nil {
		t.Fatal(err)
	}
	c := script("app", vm.ContainerApp, vm.RestartOnFailure, `test "$V" = new || { echo "V='new'" > `+dir+`/v/f; exit 1; }`)
	c.fileKeys, c.readFile = []vm.FileKey{{Name: "V", Volume: "v", Path: "f", Key: "V"}}, fileIn(dir)
	p := several(t, c)
	for {
		all, changed := p.look()
		if s := all[0]; s.Reason == vm.ContainerConfigError {
			if s.State != vm.ContainerWaiting || !s.StartedAt.IsZero() || s.Restarts != 0 || !strings.Contains(s.Message, "env file") {
				t.Errorf("while the file is missing: %+v", s)
			}
			break
		}
		<-changed
	}
	if err := os.WriteFile(dir+"/v/f.new", []byte("V='old'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(dir+"/v/f.new", dir+"/v/f"); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if all, _ := p.look(); all[0].State != vm.ContainerTerminated || all[0].Exit.Code != 0 || all[0].Restarts != 1 {
		t.Errorf("got %+v", all[0])
	}
}

// One that waits for its file does not hold up the end of the guest.
func TestStopOfContainersThatWaitForFiles(t *testing.T) {
	c := script("app", vm.ContainerApp, vm.RestartNever, "true")
	c.fileKeys, c.readFile = []vm.FileKey{{Name: "V", Volume: "v", Path: "f", Key: "V"}}, fileIn(t.TempDir())
	p := several(t, c)
	p.shutdown(t.Context(), 0)
	<-p.done
	if all, _ := p.look(); all[0].State != vm.ContainerWaiting {
		t.Errorf("got %+v", all[0])
	}
}
