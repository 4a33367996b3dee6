package convert

import "testing"

func TestCgroup(t *testing.T) {
	for given, want := range map[string]string{
		"": "", "/": "", "-.slice": "",
		"/kubepods/burstable/pod12-34":    "/kubepods/burstable/pod12-34",
		"kubepods/pod1/":                  "/kubepods/pod1",
		"/k8s.io":                         "/k8s.io",
		"/test.slice":                     "/test.slice",
		"kubepods-burstable-pod1_2.slice": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice",
		"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice",
	} {
		if got, err := cgroup(given); got != want || err != nil {
			t.Errorf("%q: %q, %v, want %q", given, got, err, want)
		}
	}
	for _, bad := range []string{"a--b.slice", "-a.slice", "a-.slice", ".slice", "/kubepods/../system", ".."} {
		if got, err := cgroup(bad); err == nil {
			t.Errorf("%q is taken as %q", bad, got)
		}
	}
}
