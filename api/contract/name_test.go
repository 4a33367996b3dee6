package contract

import (
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

func TestVMName(t *testing.T) {
	long := strings.Repeat("n", 63)
	for _, c := range []struct{ namespace, pod, want string }{
		{"default", "web", "vk-default-web"},
		{"prod", "eu-db", "vk-prod-eu-db"},
		{"prod-eu", "db", "vk--prod-eu.db"},
		{"default", "a.b-c", "vk-default-a.b-c"},
		{"kube-system", "a.b", "vk--kube-system.a.b"},
		{"default", strings.Repeat("p", 52), "vk-default-" + strings.Repeat("p", 52)},
		{"default", strings.Repeat("p", 53), "vk---default." + strings.Repeat("p", 33) + "-l6gjuaqp2vwfnbst"},
		{long, "web", "vk---" + long[:41] + "-nxdg35svyfos4vjr"},
	} {
		if got := VMName(c.namespace, c.pod); got != c.want {
			t.Errorf("%s/%s is %s, want %s", c.namespace, c.pod, got, c.want)
		}
	}
	if VMName("a", long) == VMName("a", long+"x") {
		t.Error("two pods with the same beginning share a name")
	}
}

var vmNameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// checkName fails t unless the name of the pod's VM is valid for a VM, an object and a repository, and leads back to that pod.
func checkName(t *testing.T, namespace, pod string) {
	t.Helper()
	name := VMName(namespace, pod)
	if !vmNameRE.MatchString(name) || len(validation.IsDNS1123Subdomain(name)) > 0 || !Pushable(name) || !repoRE.MatchString(Repository(namespace, name)) {
		t.Fatalf("%s/%s is called %s, which cannot be", namespace, pod, name)
	}
	for _, name := range []string{name, OldVMName(namespace, pod)} {
		if CanonicalVMName(namespace, name) != VMName(namespace, pod) || !MayName(namespace, name) {
			t.Fatalf("%s is not known for the VM of %s/%s", name, namespace, pod)
		}
	}
	if !MayNameOf(namespace, pod, VMName(namespace, pod+"-7")) || SlotOf(namespace, pod, VMName(namespace, pod+"-7")) != 7 {
		t.Fatalf("slot 7 of set %s/%s is not known by %s", namespace, pod, VMName(namespace, pod+"-7"))
	}
}

// No two pods share a VM name, however their names and namespaces are split, and every name is valid.
func TestVMNameIsInjective(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 2))
	word := func(most int, dots bool) string {
		const letters = "ab0"
		n := 1 + r.IntN(most)
		b := make([]byte, n)
		for i := range b {
			b[i] = letters[r.IntN(len(letters))]
			inside := i > 0 && i < n-1
			switch {
			case inside && r.IntN(3) == 0 && b[i-1] != '.':
				b[i] = '-'
			case inside && dots && r.IntN(8) == 0 && b[i-1] != '-' && b[i-1] != '.':
				b[i] = '.'
			}
		}
		return strings.ReplaceAll(string(b), "-.", "0.")
	}
	seen := map[string]string{}
	for range 20000 {
		namespace, pod := word(8, false), word(8, true)
		if r.IntN(4) == 0 {
			namespace, pod = word(63, false), word(80, true)
		}
		if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(pod)) > 0 {
			t.Fatalf("the test makes %s/%s, which is none", namespace, pod)
		}
		checkName(t, namespace, pod)
		who, name := namespace+"/"+pod, VMName(namespace, pod)
		if other, taken := seen[name]; taken && other != who {
			t.Fatalf("%s and %s are both called %s", other, who, name)
		}
		seen[name] = who
	}
	if len(seen) < 10000 {
		t.Fatalf("only %d pods were tried", len(seen))
	}
}

func FuzzVMName(f *testing.F) {
	f.Add("prod", "eu-db", "prod-eu", "db")
	f.Add("a", strings.Repeat("b", 80), "a", strings.Repeat("b", 81))
	f.Fuzz(func(t *testing.T, ns1, pod1, ns2, pod2 string) {
		MayName(ns1, pod1)
		SlotOf(ns1, pod1, pod2)
		Aliases(ns1, pod2)
		for _, ns := range []string{ns1, ns2} {
			if len(validation.IsDNS1123Label(ns)) > 0 {
				return
			}
		}
		for _, pod := range []string{pod1, pod2} {
			if len(validation.IsDNS1123Subdomain(pod)) > 0 {
				return
			}
		}
		checkName(t, ns1, pod1)
		if (ns1 != ns2 || pod1 != pod2) && VMName(ns1, pod1) == VMName(ns2, pod2) {
			t.Fatalf("%s/%s and %s/%s are both called %s", ns1, pod1, ns2, pod2, VMName(ns1, pod1))
		}
		if ns1 != ns2 && Repository(ns1, VMName(ns1, pod1)) == Repository(ns2, VMName(ns2, pod2)) {
			t.Fatal("two namespaces share a repository")
		}
	})
}

func TestMayName(t *testing.T) {
	long := strings.Repeat("x", 60)
	for _, c := range []struct {
		namespace, name string
		want            bool
	}{
		{"prod", "db", true},
		{"prod", "Db_1", true},
		{"prod", "vk", true},
		{"prod", "vk-prod-db", true},
		{"prod", "vk-prod-eu-db", true},
		{"prod-eu", "vk-prod-eu-db", true}, // as other tools of this contract name it
		{"prod-eu", "vk-prod-db", false},
		{"prod", "vk-victim-db", false},
		{"prod", "vk-prod", false},
		{"prod", "vk-", false},
		{"prod-eu", "vk--prod-eu.db", true},
		{"prod", "vk--prod-eu.db", false},
		{"prod-eu", "vk--prod.db", false},
		{"prod", "vk---prod.db-aaaaaaaaaaaaaaaa", true},
		{"prod", "vk---prod-eu.db-aaaaaaaaaaaaaaaa", false},
		{"prod", "vk---", false},
		{"prod", VMName("prod", long), true},
		{"pro", VMName("prod", long), false},
		{"prod", VMName("prod-eu", long), false},
	} {
		if got := MayName(c.namespace, c.name); got != c.want {
			t.Errorf("%s in %s: %v", c.name, c.namespace, got)
		}
	}
	if MayNameOf("prod", "a", "db") || MayNameOf("prod", "a", "vk-prod-ab-0") || !MayNameOf("prod", "a", "vk-prod-a-box") {
		t.Error("a name that is none of the set's is, or one is not")
	}
}

func TestSlotOfOtherNames(t *testing.T) {
	for _, c := range []struct {
		namespace, set, name string
		want                 int
	}{
		{"a-b", "set", "vk--a-b.set-3", 3},
		{"a-b", "set", "vk-a-b-set-3", 3}, // from an earlier release
		{"a", "b-set", "vk--a-b.set-3", -1},
		{"a-b", "set", "vk--a-b.set-03", -1},
		{"a", strings.Repeat("s", 60), VMName("a", strings.Repeat("s", 60)+"-12"), 12},
		{"a", strings.Repeat("s", 60), VMName("a", strings.Repeat("s", 60)+"-box"), -1},
	} {
		if got := SlotOf(c.namespace, c.set, c.name); got != c.want {
			t.Errorf("%s in set %s/%s is slot %d, want %d", c.name, c.namespace, c.set, got, c.want)
		}
	}
}

func TestAliases(t *testing.T) {
	for _, c := range []struct{ namespace, name, want string }{
		{"prod", "vk-prod-db", "[vk-prod-db]"},
		{"prod-eu", "vk--prod-eu.db", "[vk--prod-eu.db vk-prod-eu-db]"},
		{"prod-eu", "vk-prod-eu-db", "[vk-prod-eu-db vk--prod-eu.db]"},
		{"prod-eu", "mine", "[mine]"},
		{"prod-eu", "vk-prod-eu--x", "[vk-prod-eu--x]"}, // the name of no pod
	} {
		if got := fmt.Sprint(Aliases(c.namespace, c.name)); got != c.want {
			t.Errorf("%s in %s: %s", c.name, c.namespace, got)
		}
	}
}

// The scheduler plugin is in another module and has its own copy of this code. Its test reads the same file.
func TestVMNamesOfGoldenFile(t *testing.T) {
	data, err := os.ReadFile("testdata/vmnames.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if got := VMName(f[0], f[1]); got != f[2] {
			t.Errorf("%s/%s is %s, want %s", f[0], f[1], got, f[2])
		}
	}
}
