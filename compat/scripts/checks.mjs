// What the scripts for Node share: where the server is, and checks that report a JSON line each.
export const at = {
  address: process.env.MICROSCALE_ADDRESS,
  v1: `${process.env.MICROSCALE_ADDRESS}/v1`,
  key: process.env.MICROSCALE_KEY,
  model: process.env.MICROSCALE_MODEL,
};

const checks = [];
export const check = (name, run) => checks.push([name, run]);

export function must(condition, told) {
  if (!condition) throw new Error(typeof told === "string" ? told : JSON.stringify(told));
}

export async function main() {
  const only = process.env.MICROSCALE_CHECK;
  let failed = 0;
  for (const [name, run] of checks) {
    if (only && !name.includes(only)) continue;
    try {
      await run();
      console.log(JSON.stringify({ check: name, ok: true }));
    } catch (error) {
      failed += 1;
      const body = error.responseBody ?? (error.error ? JSON.stringify(error.error) : "");
      console.log(JSON.stringify({ check: name, ok: false, detail: `${error.stack ?? error} ${body}`.slice(0, 2000) }));
    }
  }
  process.exit(failed ? 1 : 0);
}
