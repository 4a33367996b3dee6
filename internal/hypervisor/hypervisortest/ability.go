package hypervisortest

import (
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
)

// testAbilities: what the driver says that it can do is what its instances can do.
func testAbilities(t *testing.T, s *suite) {
	i := s.launch(t, s.plan(t))
	told, can := hypervisor.Abilities(t.Context(), s.driver), hypervisor.InstanceAbilities(i)
	if len(can) == 0 {
		t.Error("an instance can do nothing")
	}
	blank, ok := hypervisor.As[hypervisor.InstanceTeller](s.driver)
	if !ok || !slices.Equal(hypervisor.InstanceAbilities(blank.Blank()), can) {
		t.Fatalf("an instance can do %q, and the driver tells something else", can)
	}
	for _, a := range can {
		if !slices.Contains(told, a) {
			t.Errorf("the driver does not tell %q, which its instances can do: %q", a, told)
		}
	}
}
