package jail

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTrim(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	line := "0123456789\n"
	if err := os.WriteFile(path, []byte(strings.Repeat(line, 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	w, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := trim(path, 2000); err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(path); len(data) != 1100 {
		t.Errorf("a short log was cut to %d bytes", len(data))
	}
	if err := trim(path, 1000); err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("end\n"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if want := strings.Repeat(line, 45) + "end\n"; err != nil || string(data) != want {
		t.Errorf("the log is %d bytes %.20q…, %v; want %d", len(data), data, err, len(want))
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := trim(link, 10); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.ReadFile(path); len(after) != len(data) {
		t.Error("trim followed a symlink")
	}
}

// TestDropBounds: a process leaves no log of any size when it ends.
func TestDropBounds(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	k := &Keeper{limit: 4096, names: []string{"log"}}
	k.Add(dir)
	if err := os.Truncate(path, 1<<43); err != nil {
		t.Fatal(err)
	}
	k.Drop(dir)
	if st, err := os.Stat(path); err != nil || st.Size() > k.limit {
		t.Errorf("it has %d bytes, %v; want at most %d", st.Size(), err, k.limit)
	}
}
