package logins

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registries.json")
	s := Open(path)
	for _, x := range [][3]string{{"R.Example:5000", "ann", "p:w"}, {"index.docker.io", "bob", "hub"}, {"r.example:5000", "ann", "s3cret"}} {
		if err := s.Login(x[0], x[1], x[2]); err != nil {
			t.Fatal(err)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	for range 2 { // as it is, and as it is read again
		all, err := s.List()
		if err != nil || len(all) != 2 || all[0] != (Login{"docker.io", "bob"}) || all[1] != (Login{"r.example:5000", "ann"}) {
			t.Errorf("%v, %v", all, err)
		}
		for name, want := range map[string]string{
			"r.example:5000/app:1": "s3cret", "R.EXAMPLE:5000/app": "s3cret", "nginx": "hub", "library/nginx:1": "hub", "docker.io/a/b@sha256:x": "hub",
			"r.example/app": "", "r.example:5001/app": "", "x.r.example:5000/app": "", "r.example:5000.evil.example/app": "",
			"https://r.example:5000/disk.qcow2": "", "localhost/app": "", "": "hub",
		} {
			got := ""
			if found := s.Find(name); len(found) > 0 {
				got = found[0].Password
			}
			if got != want {
				t.Errorf("%q gets %q, want %q", name, got, want)
			}
		}
		s = Open(path)
	}
	if err := s.Logout("r.example:5000"); err != nil || len(s.Find("r.example:5000/app")) > 0 {
		t.Error(err)
	}
	if err := s.Logout("r.example:5000"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	data, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(data), "r.example") {
		t.Errorf("%s, %v", data, err)
	}
}

func TestRefused(t *testing.T) {
	s := Open(filepath.Join(t.TempDir(), "registries.json"))
	for _, x := range [][3]string{
		{"", "a", "b"},
		{"r.example/path", "a", "b"},
		{"*.example", "a", "b"},
		{"https://r.example", "a", "b"},
		{"r.example:0", "a", "b"},
		{"r.example:05000", "a", "b"},
		{"r.example:70000", "a", "b"},
		{"r example", "a", "b"},
		{"::1", "a", "b"},
		{"r.example", "", "b"},
		{"r.example", "a:b", "b"},
		{"r.example", "a", ""},
		{"r.example", "a", "b\nc"},
		{"r.example", "a", strings.Repeat("x", maxPassword+1)},
		{"r.example", "a\x00", "b"},
	} {
		if err := s.Login(x[0], x[1], x[2]); !errdefs.IsInvalid(err) || x[2] != "" && len(x[2]) > 3 && strings.Contains(err.Error(), x[2]) {
			t.Errorf("%q: %v", x, err)
		}
	}
	for _, host := range []string{"r", "localhost", "localhost:5000", "192.0.2.1:5000", "[2001:db8::1]:5000"} {
		if _, err := Host(host); err != nil {
			t.Error(err)
		}
	}
}

// A file that cannot be read is neither used nor replaced.
func TestDamaged(t *testing.T) {
	for name, prepare := range map[string]func(string) error{
		"text": func(p string) error { return os.WriteFile(p, []byte("{"), 0o600) },
		"readable": func(p string) error {
			return os.WriteFile(p, []byte(`{"auths": {"r.example": {"auth": "YTpi"}}}`), 0o644)
		},
		"pattern": func(p string) error {
			return os.WriteFile(p, []byte(`{"auths": {"*.example": {"auth": "YTpi"}}}`), 0o600)
		},
		"link":      func(p string) error { return os.Symlink("/dev/null", p) },
		"no base64": func(p string) error { return os.WriteFile(p, []byte(`{"auths": {"r.example": {"auth": "!"}}}`), 0o600) },
	} {
		path := filepath.Join(t.TempDir(), "registries.json")
		if err := prepare(path); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(path)
		s := Open(path)
		if _, err := s.List(); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", name, err)
		}
		if err := s.Login("r.example", "a", "b"); !errdefs.Is(err, errdefs.DataLoss) || len(s.Find("r.example/x")) > 0 {
			t.Errorf("%s: %v", name, err)
		}
		if after, _ := os.ReadFile(path); string(after) != string(before) {
			t.Errorf("%s: the file has changed", name)
		}
	}
}

func FuzzHost(f *testing.F) {
	for _, s := range []string{"r.example:5000", "[::1]:5000", "docker.io", "*.x", "a/b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		host, err := Host(s)
		if err != nil {
			return
		}
		if again, err := Host(host); err != nil || again != host || strings.ContainsAny(host, "*?/\\ @\n") {
			t.Errorf("%q is %q, and then %q, %v", s, host, again, err)
		}
	})
}
