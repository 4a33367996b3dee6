package up

import (
	"context"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestKubeconfigHoldsEverything(t *testing.T) {
	dir := t.TempDir()
	s := Settings{APIPort: 7443}
	p := made(t, filepath.Join(dir, "pki"), time.Now(), s)
	path := filepath.Join(dir, "kubeconfig")
	if err := writeKubeconfig(path, p, s, "admin"); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: it holds a key", fi, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var k struct {
		CurrentContext string `json:"current-context"`
		Clusters       []struct {
			Name    string
			Cluster struct {
				Server string
				CA     string `json:"certificate-authority-data"`
			}
		}
		Users []struct {
			Name string
			User struct {
				Cert string `json:"client-certificate-data"`
				Key  string `json:"client-key-data"`
			}
		}
		Contexts []struct {
			Name    string
			Context struct{ Cluster, User string }
		}
	}
	if err := yaml.Unmarshal(data, &k); err != nil {
		t.Fatal(err)
	}
	if len(k.Clusters) != 1 || len(k.Users) != 1 || len(k.Contexts) != 1 || k.Contexts[0].Name != k.CurrentContext ||
		k.Contexts[0].Context.Cluster != k.Clusters[0].Name || k.Contexts[0].Context.User != k.Users[0].Name {
		t.Fatalf("the parts do not name each other:\n%+v", k)
	}
	if got := k.Clusters[0].Cluster.Server; got != "https://127.0.0.1:7443" {
		t.Errorf("server %s", got)
	}
	for field, c := range map[string]struct{ got, file string }{
		"ca":   {k.Clusters[0].Cluster.CA, p.crt("ca")},
		"cert": {k.Users[0].User.Cert, p.crt("admin")},
		"key":  {k.Users[0].User.Key, p.key("admin")},
	} {
		want, err := os.ReadFile(c.file)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := base64.StdEncoding.DecodeString(c.got); err != nil || string(got) != string(want) {
			t.Errorf("%s is not the content of %s (%v)", field, c.file, err)
		}
	}
	if strings.Contains(string(data), dir) {
		t.Error("it points at files and cannot be copied elsewhere")
	}
}

func TestInstancesOfOneMachineAreToldApart(t *testing.T) {
	network := func(dir string, i int, names ...string) object {
		s := Settings{}
		for _, name := range names {
			s.Nodes = append(s.Nodes, NodeSettings{Name: name})
		}
		return cocoondConfig(layout{dir}.node(s, i), pki{}, s, Assets{}, false)["network"].(object)
	}
	a, b, again := network("/a", 0, "n"), network("/b", 0, "n"), network("/a", 0, "other")
	if first, second := network("/a", 0, "n-0", "n-1"), network("/a", 1, "n-0", "n-1"); first["instance"] == second["instance"] || first["bridge"] == second["bridge"] {
		t.Errorf("two nodes of an instance have %v and %v", first, second)
	}
	for _, key := range []string{"instance", "bridge"} {
		if a[key] == b[key] {
			t.Errorf("two instances share %s %v", key, a[key])
		}
		if a[key] != again[key] {
			t.Errorf("%s of one instance is %v, then %v", key, a[key], again[key])
		}
	}
	if name := a["bridge"].(string); len(name) > 15 {
		t.Errorf("%s is longer than the name of a link may be", name)
	}
}

func TestAwait(t *testing.T) {
	in := &instance{}
	log := filepath.Join(t.TempDir(), "child.log")
	if err := os.WriteFile(log, []byte("first\nthe last word\n\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := child{name: "child", log: log}
	never := func(context.Context) bool { return false }
	if err := in.await(t.Context(), c, nil, func(context.Context) bool { return true }); err != nil {
		t.Errorf("ready: %v", err)
	}
	ended := make(chan error, 1)
	ended <- errors.New("exit status 3")
	if err := in.await(t.Context(), c, ended, never); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "the last word") {
		t.Errorf("ended: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := in.await(ctx, c, nil, never); !errdefs.Is(err, errdefs.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := in.await(ctx, c, nil, never); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), log) {
		t.Errorf("too slow: %v", err)
	}
}
