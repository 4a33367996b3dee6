package vm

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestValidateName(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "A-b.c_9": true, strings.Repeat("x", 63): true,
		"": false, strings.Repeat("x", 64): false, "-a": false, ".a": false, "a/b": false, "a b": false, "ä": false, "a\n": false,
	} {
		if err := ValidateName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		} else if err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%q: class %v", name, errdefs.ClassOf(err))
		}
	}
}

func TestNewID(t *testing.T) {
	re := regexp.MustCompile(`^[a-z2-7]{26}$`)
	seen := map[ID]bool{}
	for range 1000 {
		id := NewID()
		if !re.MatchString(string(id)) || seen[id] {
			t.Fatalf("id %q", id)
		}
		seen[id] = true
	}
}

func good() Spec { return Spec{Name: "a.b_c", Image: "demo"}.Default() }

func TestDefaultSpecIsValid(t *testing.T) {
	s := good()
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	if s.Hostname != "a-b-c" || s.CPUs != DefaultCPUs || s.Accel != AccelAuto || s.StopGrace != DefaultStopGrace {
		t.Errorf("defaults: %+v", s)
	}
}

func TestValidateRefuses(t *testing.T) {
	for name, change := range map[string]func(*Spec){
		"no image":          func(s *Spec) { s.Image = "" },
		"no CPU":            func(s *Spec) { s.CPUs = -1 },
		"many CPUs":         func(s *Spec) { s.CPUs = 1000 },
		"little memory":     func(s *Spec) { s.Memory = MinMemory - 1 },
		"little storage":    func(s *Spec) { s.Storage = 1 },
		"accelerator":       func(s *Spec) { s.Accel = "warp" },
		"firmware":          func(s *Spec) { s.Firmware = "coreboot" },
		"host name":         func(s *Spec) { s.Hostname = "a b" },
		"grace":             func(s *Spec) { s.StopGrace = -time.Second },
		"env name":          func(s *Spec) { s.Process.Env = []EnvVar{{Name: "A=B"}} },
		"multicast MAC":     func(s *Spec) { s.NICs = []NICSpec{{MAC: "01:00:00:00:00:01"}} },
		"malformed MAC":     func(s *Spec) { s.NICs = []NICSpec{{MAC: "xx"}} },
		"infiniband length": func(s *Spec) { s.NICs = []NICSpec{{MAC: "02:00:5e:10:00:00:00:01"}} },
	} {
		s := good()
		change(&s)
		if err := s.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMatch(t *testing.T) {
	kind := Kind{Noun: "VM", List: "cocoon vm list"}
	prod, dev, operator := Owner{Namespace: "prod"}, Owner{Namespace: "dev"}, Owner{}
	all := []Named{
		{ID: "abcdef", Name: "web"},
		{ID: "abcxyz", Name: "db"},
		{ID: "qqqqqq", Name: "abcdef2"},
		{ID: "zzzzzz", Name: "abc"},
		{ID: "ppp111", Name: "web", Owner: prod},
		{ID: "ddd111", Name: "web", Owner: dev},
		{ID: "ppp222", Name: "only", Owner: prod},
		{ID: "ppp333", Name: "two", Owner: prod},
		{ID: "ddd333", Name: "two", Owner: dev},
		{ID: "ddd444", Name: "abcxyz", Owner: dev}, // its name is another VM's id
		{ID: "ooo111", Name: "golden", Shared: []string{"prod"}},
	}
	for _, tt := range []struct {
		who  Owner
		ref  string
		want ID // "": NotFound
	}{
		{operator, "abcdef", "abcdef"},
		{operator, "web", "abcdef"},
		{operator, "abcd", "abcdef"},
		{operator, "abcx", "abcxyz"},
		{operator, "abc", "zzzzzz"},
		{operator, "qqq", "qqqqqq"},
		{operator, "abcxyz", "abcxyz"},
		{operator, "prod/web", "ppp111"},
		{operator, "only", "ppp222"},
		{operator, "", ""},
		{operator, "ab", ""},
		{operator, "nothing", ""},
		{prod, "web", "ppp111"},
		{prod, "prod/web", "ppp111"},
		{prod, "ppp111", "ppp111"},
		{prod, "dev/web", ""},
		{prod, "ddd111", ""},
		{prod, "ddd", ""},
		{prod, "db", ""},
		{prod, "abcdef", ""},
		{prod, "golden", "ooo111"},
		{prod, "ooo111", "ooo111"},
		{dev, "golden", ""},
		{dev, "ooo", ""},
		{dev, "abcxyz", "ddd444"},
	} {
		got, err := kind.Match(tt.who, tt.ref, slices.Values(all))
		if got != tt.want || (tt.want == "") != errdefs.IsNotFound(err) {
			t.Errorf("%q asks for %q: %q, %v; want %q", tt.who.Namespace, tt.ref, got, err, tt.want)
		}
	}
	if _, err := kind.Match(operator, "abc", slices.Values(all[:2])); !errdefs.IsInvalid(err) {
		t.Errorf("ambiguous prefix: %v", err)
	}
	if _, err := kind.Match(operator, "two", slices.Values(all)); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "dev/two, prod/two") {
		t.Errorf("a name that two namespaces have: %v", err)
	}
}

func FuzzSpecNames(f *testing.F) {
	f.Add("web", "h")
	f.Add("a/b", "-")
	f.Add("..", "a.b")
	f.Fuzz(func(t *testing.T, name, host string) {
		s := Spec{Name: name, Image: "i", Hostname: host}.Default()
		if s.Validate() == nil && (strings.ContainsAny(name, "/\x00\n ") || len(name) > 63 || strings.ContainsAny(s.Hostname, "/ \n.")) {
			t.Errorf("accepted name %q host %q", name, s.Hostname)
		}
	})
}
