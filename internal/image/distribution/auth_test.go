package distribution

import (
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
)

func TestWhichCredentialsCover(t *testing.T) {
	for _, c := range []struct {
		key, repo string
		length    int
		ok        bool
	}{
		{"https://index.docker.io/v1/", "alpine", 0, true},
		{"docker.io", "docker.io/library/alpine", 0, true},
		{"index.docker.io", "team/app", 0, true},
		{"docker.io/team", "team/app", 4, true},
		{"docker.io/tea", "team/app", 0, false},
		{"registry.example.com", "registry.example.com/a/b", 0, true},
		{"REGISTRY.example.com/", "registry.example.com/a/b", 0, true},
		{"registry.example.com:5000", "registry.example.com/a/b", 0, false},
		{"registry.example.com/a/b", "registry.example.com/a/b", 3, true},
		{"registry.example.com/a/b/c", "registry.example.com/a/b", 0, false},
		{"*.example.com", "registry.example.com/a", 0, true},
		{"*.example.com", "a.registry.example.com/a", 0, false},
		{"example.com", "evil-example.com/a", 0, false},
		{"[", "example.com/a", 0, false},
		{"", "example.com/a", 0, false},
	} {
		repo, err := name.NewRepository(c.repo)
		if err != nil {
			t.Fatal(err)
		}
		if n, ok := covers(c.key, repo); n != c.length || ok != c.ok {
			t.Errorf("%q for %s: %d, %v", c.key, c.repo, n, ok)
		}
	}
}
